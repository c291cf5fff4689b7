"""RunPod's queue API (`/v2/{function}/run`, `runsync`, `status`, ...): routes and their description."""
