"""Rules on the loss and what drives it: does it stay finite, does it fall?"""
