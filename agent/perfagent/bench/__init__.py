"""`perfagent bench NAME`: what a technique gains on this machine, beside what the sources claim of it. One module a technique.

Nothing here is loaded by `import perfagent` or by a training job.
"""
