"""What runs and their troubles cost: hours of GPUs and cores, energy, and money where a project has a price."""
