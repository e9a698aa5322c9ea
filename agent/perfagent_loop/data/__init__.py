"""Data on its way to the model: batches of like lengths, packing, prefetching, caches, mapped files, inspection.

Each module works alone, with a DataLoader and a loop of your own as well as with `perfagent.loop`.
"""
