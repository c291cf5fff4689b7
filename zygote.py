"""The program of bases and zygotes: `python -m pilotflame.zygote base`.

Images of functions have their own pilotflame, which a gateway of another version starts by this name. So the name must not change.
"""

from .runtime.calls.worker.zygote import main

if __name__ == "__main__":
    main()
