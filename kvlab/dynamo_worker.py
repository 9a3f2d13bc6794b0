"""Starts Dynamo's vLLM worker where parts that text models never use are missing, as in vLLM's CPU build.

Dynamo imports torchvision's image code and the bindings of its GPU transfer library at start; without them the import
fails, although nothing calls them. Empty modules of these names let it start. Run by -m, in a process of its own.
"""

from __future__ import annotations

import importlib.util
import sys
import types

TRANSFER = ("nixl", "nixl._api", "nixl._bindings")
IMAGES = "transformers.models.qwen2_vl.image_processing_qwen2_vl"


def stand_in() -> None:
    """Puts empty modules where the real ones are not installed."""
    if importlib.util.find_spec("nixl") is None:
        modules = {name: types.ModuleType(name) for name in TRANSFER}
        modules["nixl"]._api, modules["nixl"]._bindings = modules["nixl._api"], modules["nixl._bindings"]
        sys.modules.update(modules)
    if importlib.util.find_spec("torchvision") is None:
        images = types.ModuleType(IMAGES)
        images.smart_resize = None
        sys.modules[IMAGES] = images


stand_in()  # in the engine's processes too, which import this file again

if __name__ == "__main__":
    from dynamo.vllm.main import main

    main()
