#!/usr/bin/env bash
# torchrun with the probe in front of whatever PYTHONPATH the script exports.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH=$here/probe${PYTHONPATH:+:$PYTHONPATH}
exec "$HAPMOE_PROFILE_TORCHRUN" "$@"
