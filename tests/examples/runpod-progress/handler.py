import os

import runpod


def process(job):
    steps = job["input"]["steps"]
    for step in range(1, steps + 1):
        runpod.serverless.progress_update(job, f"Step {step}/{steps}")
        if os.path.exists(job["input"].get("wait_at", "")):
            # A named pipe: this waits until the test has looked at the progress.
            open(job["input"]["wait_at"]).read()
    return {"steps": steps, "webhook": job.get("webhook")}


runpod.serverless.start({"handler": process})
