"""A stand-in in PATH for a program installed next to Python, which runs it without starting an interpreter.

`commands.write_shims` writes it, with a shebang line. It passes the command, the streams and the signals to the process
that has imported torch, and executes the program itself if that process cannot fork it.
"""

import json
import os
import signal
import socket
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM")


def send(message, streams=()):
    body = json.dumps(message).encode()
    socket.send_fds(connection, [len(body).to_bytes(8, "big")], streams)
    connection.sendall(body)


def receive():
    size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
    return json.loads(connection.recv(size, socket.MSG_WAITALL))


with open(f"{HERE}/settings.json", encoding="utf-8") as file:
    settings = json.load(file)
command = [f"{settings['programs']}/{os.path.basename(__file__)}", *sys.argv[1:]]
environment = dict(os.environ)
environment["PATH"] = os.pathsep.join(part for part in environment["PATH"].split(os.pathsep) if part != HERE)
connection = socket.socket(socket.AF_UNIX)
connection.connect(settings["address"])
send({"command": command, "environment": environment, "folder": os.getcwd()}, [0, 1, 2])
if "pid" not in receive():
    os.execve(command[0], command, environment)
for name in PASSED_ON:
    if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:
        signal.signal(getattr(signal, name), lambda number, _: send({"signal": number}))
code = receive()["code"]
if code < 0:  # exit by the same signal
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
