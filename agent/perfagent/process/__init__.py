"""This process: how it was launched, its name, descriptors and allocator, and how it ends. Imports no other room."""
