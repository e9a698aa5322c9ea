"""Rules on time: what does a step wait for?"""
