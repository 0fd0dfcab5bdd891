"""flash-linear-attention's kernels without their tuning."""

import pytest


@pytest.fixture(scope="module")
def untuned():
    """Makes Triton's autotuners run the first configuration that fits, and try no other.

    flash-linear-attention lists dozens of them; compiling and timing all takes minutes and changes only the speed.
    """
    autotuner = pytest.importorskip("triton.runtime.autotuner")

    def run(self, *args, **kwargs):
        self.nargs, refusal = dict(zip(self.arg_names, args, strict=False)), None
        for config in self.prune_configs(kwargs):
            try:
                return self.fn.run(*args, **kwargs, **config.all_kwargs())
            except autotuner.OutOfResources as error:
                refusal = error
        raise refusal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotuner.Autotuner, "run", run)
        yield
