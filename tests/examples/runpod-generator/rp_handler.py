import runpod


def handler(job):
    text = job["input"]["text"]
    for word in text.split():
        yield {"token": word}


if __name__ == "__main__":
    runpod.serverless.start({"handler": handler, "return_aggregate_stream": True})
