"""A handler for RunPod Serverless, unchanged."""

import runpod


def handler(job):
    text = job["input"]["prompt"]
    runpod.serverless.progress_update(job, "counting")
    return {"words": len(text.split())}


runpod.serverless.start({"handler": handler})
