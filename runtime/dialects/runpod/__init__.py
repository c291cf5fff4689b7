"""RunPod's queue API: `/v2/{function}/run`, `runsync`, `status` and the rest."""
