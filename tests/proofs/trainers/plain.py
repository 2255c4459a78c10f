"""The same loops without forge: what `run` does, as far as it concerns the results."""

from tiny import FORGE, IS_PLAIN


class PlainRun:
    """Loops as people write them without forge."""

    def __enter__(self):
        self.step, self.functions = 0, []
        return self

    def __exit__(self, *error):
        pass

    def every(self, **_):
        return self.functions.append

    def log(self, **values):
        pass

    def epochs(self, count):
        for epoch in range(count):
            yield epoch
            for function in self.functions:
                function(self.step)

    def batches(self, loader):
        for batch in loader:
            yield self.step, batch
            self.step += 1

    def steps(self, count, loader):
        while True:
            for batch in loader:
                if self.step == count:
                    return
                yield self.step, batch
                self.step += 1


def open_run(accelerator):
    """forge's AcceleratedRun, or its stand-in."""
    if IS_PLAIN:
        return PlainRun()
    from forge.integrations.accelerate import AcceleratedRun

    return AcceleratedRun(FORGE["policy"], accelerator)
