import asyncio, sys, time
from ownloop_sandbox.sandboxes import *
async def main(way):
    async def pong(r,w): 
        w.write(b"pong"); await w.drain(); w.close()
    server = await asyncio.start_server(pong, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    t=time.time()
    box = make_sandbox(way, Place(url=f"http://127.0.0.1:{port}"))
    t=time.time()
    await box.create(); print("created", time.time()-t)
    await box.put("a/b.txt", "hello")
    code = f"import os, socket; print(socket.create_connection(('127.0.0.1', {port})).recv(9), os.listdir('/'), os.getuid(), open('a/b.txt').read()); open('out','w').write('x'); os.mkfifo('f'); os.symlink('/etc/passwd','l')"
    print(await box.run(["python3", "-c", code], {"PATH": "/usr/bin"}, 10))
    print(await box.run(["sleep", "100"], {"PATH": "/usr/bin"}, 1))
    print(await box.run(["sh", "-c", "id; ls -la /dev /; tty; cat /proc/self/status | grep -i -E 'cap|secc|NoNew'; (sleep 1000 &) ; mount"], {"PATH": "/usr/bin"}, 1))
    try: await box.run(["nosuch"], {}, 1)
    except Exception as e: print(repr(e))
    await box.stop()
    f = await box.files(); print(f.names, (f/"a/b.txt").read_text())
    t=time.time(); await box.destroy(); print(time.time()-t)
    server.close()
for w in sys.argv[1:]: asyncio.run(main(w))
