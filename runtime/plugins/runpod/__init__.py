"""Serves RunPod's queue API: `/v2/{function}/run`, `runsync`, `status` and the other routes of jobs."""
