"""`perfagent bench NAME`: measures what a technique gains on this machine.

One module for each technique. Nothing here is loaded by `import perfagent` or by a training job.
"""
