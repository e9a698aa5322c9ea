"""Alembic's entry: runs the migrations on the connection that schema.py hands over, inside its transaction."""

from alembic import context

from perfagent_server.store.tables import metadata

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("run migrations through perfagent_server.schema.upgrade (`perfagent db upgrade`)")
context.configure(
    connection=connection,
    target_metadata=metadata,
    render_as_batch=connection.dialect.name == "sqlite",  # SQLite cannot ALTER a column in place
    transaction_per_migration=False,
)
context.run_migrations()
