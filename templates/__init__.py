"""Templates: one folder each, which `pilotlight init` copies and never imports."""
