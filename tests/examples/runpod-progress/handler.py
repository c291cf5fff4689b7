import os

import runpod


def process(job):
    steps = job["input"]["steps"]
    for step in range(1, steps + 1):
        runpod.serverless.progress_update(job, f"Step {step}/{steps}")
        if os.path.exists(job["input"].get("wait_at", "")):
            open(job["input"]["wait_at"]).read()  # a named pipe: until somebody has looked at the progress
    return {"steps": steps, "webhook": job.get("webhook")}


runpod.serverless.start({"handler": process})
