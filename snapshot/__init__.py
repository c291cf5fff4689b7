"""Snapshots: ordinary safetensors files with a manifest beside them, restored by mapping. Useful alone."""
