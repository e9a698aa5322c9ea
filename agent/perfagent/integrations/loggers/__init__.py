"""Values that a script logs by other means than `perfagent.log` appear in its run by themselves.

libraries.py says which call of which library carries which scalars; what all of them have in common is in capture.py. A
library is watched only in a process that imports it by itself, before `attach` or after. Our own files for TensorBoard
(perfagent.mirror) are written without its SummaryWriter, so that they are not met here.
"""
