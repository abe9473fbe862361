"""Lets SGLang be imported on a CPU: what it imports and is not installed becomes a stand-in.

Runs in the engines' interpreter. Importing this module installs the stand-ins; SGLang is imported after it. Nothing
that loads weights is among them: kernels (sgl_kernel, flashinfer, deep_gemm ...), servers, tokenizers, and readers of
sound and video.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import compressed_tensors  # noqa: F401 - what is installed is imported before anything is replaced
import torch
import transformers
import transformers.image_utils
import transformers.modeling_utils
import transformers.models.auto  # noqa: F401
from transformers.utils import import_utils

# Found by a probe for it (`try: import ...`), with a branch of its own that a stand-in must not open.
_PROBED = frozenset(
    {
        "aiter",
        "amdsmi",
        "deep_gemm_npu",
        "habana_frameworks",
        "intel_extension_for_pytorch",
        "kt_kernel",
        "ktransformers",
        "mooncake_integration",
        "mori",
        "sgl_eplb",
        "sgl_kernel_npu",
        "sglang",
        "sglang_router",
        "torch_mlu",
        "torch_npu",
        "torch_xla",
        "torchaudio",
        "torchcodec",
        "triton_kernels",
        "xielu",
    }
)
_INSTALLED_FOR_VLLM = frozenset({"apache_tvm_ffi", "llguidance", "tvm_ffi", "xgrammar"})  # and of other versions here
_ANY_VERSION = "99.0"


class Anything:
    """An object that has every attribute, can be called, subclassed and indexed, and is false."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Decorators give back what they decorate."""
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __getitem__(self, item: Any) -> Any:
        return Anything()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return (object,)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _Module(types.ModuleType):
    """A module in which every name is there: classes for capital letters, else objects."""

    __version__ = _ANY_VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (Anything,), {}) if name[:1].isupper() else Anything()
        setattr(self, name, value)
        return value


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Missing(importlib.abc.MetaPathFinder):
    """Asked last: stands in for what SGLang imports and nobody else found."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if top in _PROBED or (path is None and not _imported_by_sglang()):
            return None
        if path is not None and not isinstance(sys.modules.get(top), _Module):
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)


class _OtherVersions(importlib.abc.MetaPathFinder):
    """Asked first: stands in for installed packages whose versions SGLang does not take."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] in _INSTALLED_FOR_VLLM:
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        return None


def _imported_by_sglang() -> bool:
    """Whether the file that holds the import statement is one of SGLang's."""
    frame = sys._getframe(2)
    while frame is not None and ("importlib" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return frame is not None and "/sglang/" in frame.f_code.co_filename


def _attribute_of_dummy(cls: type, name: str) -> Any:
    """What an attribute of one of transformers' classes that need torchvision is: `register` does nothing."""
    return (lambda *args, **kwargs: None) if name == "register" else type.__getattribute__(cls, name)


def _version(package: str, true: Any = importlib.metadata.version) -> str:
    """The version of a package; one that is not installed is new enough for everything."""
    try:
        return str(true(package))
    except importlib.metadata.PackageNotFoundError:
        return _ANY_VERSION


def _install() -> None:
    sys.meta_path.insert(0, _OtherVersions())
    sys.meta_path.append(_Missing())
    import_utils.requires_backends = lambda *args, **kwargs: None
    import_utils.DummyObject.__getattribute__ = _attribute_of_dummy
    importlib.metadata.version = _version
    torch.cuda.get_device_capability = lambda *args, **kwargs: (9, 0)  # asked for while SGLang is imported


_install()
