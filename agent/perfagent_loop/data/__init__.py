"""Data on its way to the model: batches of like lengths, packing, prefetching, caches, mapped files, inspection."""
