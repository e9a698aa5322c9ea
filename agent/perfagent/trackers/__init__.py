"""perfagent under the names by which trainers know a logger. perfagent.integrations shows them to scripts.

Each joins the run that the script has begun, or begins one, and writes what integrations/loggers does not record already.
"""
