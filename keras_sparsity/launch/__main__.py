"""`python -m keras_sparsity.launch run ...`."""

import sys

from keras_sparsity.launch.command_line import main

if __name__ == "__main__":
    sys.exit(main())
