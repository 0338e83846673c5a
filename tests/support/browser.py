"""Open pages in Chromium, without a window; skip where there is none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from time_limits import extended

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browse(file: Path, profile: Path, *flags: str) -> str:
    """Open a page in the browser, which does what the flags ask for, and return what it prints."""
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser_path:
        pytest.skip(f"needs one of {', '.join(BROWSERS)}")
    command = [
        *(browser_path, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions"),
        *("--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={profile}"),
        *("--virtual-time-budget=30000", *flags, file.as_uri()),
    ]
    # Its helpers are in a session of their own with it, and end with it.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as browser:
        try:
            return extended(lambda seconds: browser.communicate(timeout=seconds))[0].decode()
        finally:
            if browser.poll() is None:
                os.killpg(browser.pid, signal.SIGKILL)
