from forked import make_job  # noqa: F401 - a fixture
