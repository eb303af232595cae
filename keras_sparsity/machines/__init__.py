"""The machines of a run: settings, topology, addresses, and who may connect.

The launcher, the planner and the ranks share these files, so they do without
TensorFlow.
"""
