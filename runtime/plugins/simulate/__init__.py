"""Predicts what a policy costs and how many calls end in time, from recorded arrivals: `pilotflame simulate`."""
