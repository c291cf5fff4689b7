"""The installed package's metadata, as a package index shows it."""

from importlib import metadata

FOUND = metadata.metadata("pilotflame")


def test_the_metadata_say_for_whom_and_where_it_runs() -> None:
    classifiers = set(FOUND.get_all("Classifier", []))
    assert {
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    } <= classifiers
    assert {"inference", "serverless", "scale-to-zero", "cold-start"} <= set(FOUND["Keywords"].split(","))


def test_the_demo_is_a_command_with_its_extra() -> None:
    assert "demo" in FOUND.get_all("Provides-Extra", [])
    (command,) = metadata.entry_points(group="console_scripts", name="pilotflame")
    assert command.value == "pilotflame.runtime.cli:main"
