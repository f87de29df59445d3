"""Clusters in virtual time: real step loops, coordinators and draft workers, with simulated engines and clocks.

turns      clocks, and the order in which several clocks continue
drafts     draft workers, and the links of targets to them
virtual    one target, stepped by the caller: for tests and benchmarks of the controller
cluster    traffic, the router's choice and several targets: `outrider simulate`
workers    engines that add the programs' own time and report their steps
traffic    arrival times and lengths of requests
hardware   steps and memory of models on GPUs
figures    records of a run, and the figures computed from them
report     the figures as text or JSON

docs/PLANNING.md lists the approximations and the omitted effects.
"""
