import runpod


def handler(job):
    job_input = job["input"]
    name = job_input.get("name", "World")
    return {"greeting": f"Hello, {name}!", "job_id": job["id"]}


runpod.serverless.start({"handler": handler})
