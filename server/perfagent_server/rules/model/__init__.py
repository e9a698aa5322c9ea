"""Rules on gradients, parameters and units: do they learn?"""
