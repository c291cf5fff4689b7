"""Templates: one folder each, which `pilotflame init` copies and never imports."""
