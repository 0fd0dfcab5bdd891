"""A backend of gla-core. Importing it imports no kernel and touches no device."""

from __future__ import annotations

import torch

from gla_core.dispatch.backend import Backend, Capabilities, hookimpl


@hookimpl
def gla_register_backends() -> list[Backend]:
    from gla_plugin_template.online_softmax import online_softmax

    return [
        Backend(
            name="gla_plugin_template",
            version="0.1.0",
            ops={"online_softmax": online_softmax},
            # The calls that the backend can run, as data. gla-core refuses all other calls, with a reason that it
            # derives from this data.
            capabilities=Capabilities(
                dtypes=frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16}), cuda_graphs=True
            ),
        )
    ]
