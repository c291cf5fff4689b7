"""The templates of `pilotflame init`: one folder each, copied and never imported."""
