"""What all tests share."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# how busy the machine is says nothing of the code
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure() -> None:
    """Launchers and commands are started as from a terminal: ``nohup`` and the shell's ``&`` make processes ignore
    signals, which their children would inherit, and a shell cannot trap what it ignored when it started."""
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
