"""`perfagent bench NAME`: measures what a technique gains on this machine, next to what its sources claim.

One module for each technique. Nothing here is loaded by `import perfagent` or by a training job.
"""
