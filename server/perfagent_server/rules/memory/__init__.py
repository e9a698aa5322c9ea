"""Rules on memory and disks: will there be enough to go on?"""
