"""`perfagent watch`: all runs, or one, live in a terminal. feed.py follows the server; fleet.py and run_view.py hold what is
known and know no terminal; the rest draws with textual."""
