"""Rules on the life of the processes: do they run, are they heard, do they end?"""
