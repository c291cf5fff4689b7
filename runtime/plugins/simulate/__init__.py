"""Predicts from recorded arrivals how many calls end in time, and the cost of a policy: `pilotflame simulate`."""
