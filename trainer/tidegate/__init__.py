"""Tidegate in a training loop: fast saves on the node, durable ones on the shared file system.

```python
state = {"model": model, "optim": optim}
ckpt = tidegate.Checkpointer(state, run="lm", local="/nvme", remote="/pfs")
start = ckpt.restore()
for batch in loader:
    train(batch)
    ckpt.step(tokens=batch.num_tokens)
ckpt.close()
```
"""

from tidegate.agreement import AgreementLost
from tidegate.checkpointer import Checkpointer
from tidegate.outcomes import SavesFailed
from tidegate.restore import Restored
from tidegate.settings import Options
from tidegate.weights import Loaded, load
from tidegate_contract.cadence import Cadence, CadenceKind
from tidegate_contract.errors import Corrupt, Reject, Retry, TidegateError
from tidegate_contract.wire import Policy

__all__ = [
    "AgreementLost",
    "Cadence",
    "CadenceKind",
    "Checkpointer",
    "Corrupt",
    "Loaded",
    "Options",
    "Policy",
    "Reject",
    "Restored",
    "Retry",
    "SavesFailed",
    "TidegateError",
    "load",
]
