"""Rare measurements that the sender's thread schedules. What one of them does between two steps runs on the training thread."""
