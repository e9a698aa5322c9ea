# The server only: no torch. Built by docker-compose.yml. The first stage has the sources and pip's leftovers, the second
# only the environment that came of them.
FROM python:3.11-slim AS build
WORKDIR /src
RUN python -m venv /opt/perfagent
COPY constraints.txt ./
RUN /opt/perfagent/bin/pip install --no-cache-dir -c constraints.txt pip hatchling
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY agent agent
COPY server server
COPY client client
COPY dashboard dashboard
RUN /opt/perfagent/bin/pip install --no-cache-dir -c constraints.txt '.[server,otel,clickhouse]'

FROM python:3.11-slim
RUN useradd --create-home --uid 10001 perfagent && install -d -o perfagent -g perfagent -m 0700 /data
COPY --from=build /opt/perfagent /opt/perfagent
ENV PATH=/opt/perfagent/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /home/perfagent
VOLUME /data
EXPOSE 8420
# http.client asks no proxy, which Docker may have put into the container's environment.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s CMD ["python", "-c", "import http.client as h, os; c = h.HTTPConnection('127.0.0.1', int(os.environ.get('PERFAGENT_PORT', 8420)), timeout=5); c.request('GET', '/readyz'); exit(c.getresponse().status != 200)"]
CMD ["perfagent", "up", "--host", "0.0.0.0", "--data", "/data"]
