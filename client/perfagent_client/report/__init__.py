"""A run's report: one HTML file that is read offline. facts.py asks the server, page.py makes the HTML (pure; the
dashboard may call it too), command.py is `perfagent report`."""
