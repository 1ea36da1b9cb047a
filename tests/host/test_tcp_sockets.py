"""The kernel's table of TCP sockets: ports, sockets that listen, and the processes that have them."""

from __future__ import annotations

import os
import socket

from slurmddp.host.tcp_sockets import TcpSocket, inodes_of, parse, tcp_sockets

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1
   1: 0100007F:C350 0100007F:1F90 06 00000000:00000000 03:00001770 00000000     0        0 0 3
"""
TABLE_OF_IPV6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr
   0: 00000000000000000000000001000000:01BB 00000000000000000000000001000000:C351 01 0:0 00:0 0 0 0 12 1
"""


def test_the_tables_of_both_families() -> None:
    assert list(parse(TABLE)) == [
        TcpSocket(frozenset({8080, 0}), listens=True, inode="4711"),
        TcpSocket(frozenset({50000, 8080}), listens=False, inode="0"),
    ]
    assert list(parse(TABLE_OF_IPV6)) == [TcpSocket(frozenset({443, 50001}), listens=False, inode="12")]


def test_a_listener_entryof_this_process_and_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (listener_entry,) = [entry for entry in tcp_sockets() if port in entry.ports and entry.listens]
        assert listener_entry.inode in inodes_of([os.getpid()])
    assert listener_entry.inode not in inodes_of([os.getpid()])
    assert inodes_of([2**22 + 1]) == set(), "no process has this pid"
