"""Runs the invocations of one revision: queues them, sends them to workers, and ends them at their deadlines.

Start reading at `revision.py`. Each part owns its state, and commands the parts below it by method calls:

    Revision            accepts invocations, and tells its watcher what may change the number of workers
      EqualCalls        lets calls wait for the output of an equal call
      Dispatcher        has the queue; the only part that changes an invocation's state
        TimeLimits      finds invocations whose time is over, and workers whose handler call does not end
          Deadlines     has a timer for each invocation
        Durations       learns how long starts and calls take
        LateWorkers     asks back the invocations that wait at workers whose calls are late
      Replicas          lists the workers; only the pool (`reconciling`) changes the list
        Replica         has the link and the state of one worker
          SentCalls     has the invocations that the worker has not ended
    ResponseCache       has the stored answers of all functions; a call that it answers is not submitted

`reconciling` decides how many workers there are, and starts and ends them; only a worker whose call does not end is replaced here
(`Replica.replace`). The package `serving` must not import anything of HTTP, jobs or deployments.
"""
