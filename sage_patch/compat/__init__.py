"""What other projects call SageAttention by, answered by ours: `sageattention.py` has the functions, `install` puts
them where `import sageattention` finds them."""

from sage_patch.compat.register import Installed, InstallError, install

__all__ = ["InstallError", "Installed", "install"]
