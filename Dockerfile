# The server only: no torch. Built by docker-compose.yml.
FROM python:3.11-slim
WORKDIR /src
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY agent agent
COPY server server
COPY client client
COPY dashboard dashboard
RUN pip install --no-cache-dir -c constraints.txt '.[server,dashboard]' && rm -rf /src/*
RUN useradd --create-home --uid 10001 perfagent && install -d -o perfagent -g perfagent -m 0700 /data
USER perfagent
WORKDIR /home/perfagent
VOLUME /data
EXPOSE 8420
CMD ["perfagent", "up", "--host", "0.0.0.0", "--data", "/data"]
