"""Advice: what a launch, a run or a failure says, and the change that would help most."""
