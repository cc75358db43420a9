package main

// A connection to the broker: section 11.

import (
	"fmt"
	"math/rand"
	"os"
	"time"

	mqtt "github.com/eclipse/paho.mqtt.golang"
)

func (c *client) send(topic, kind, id string, fields object) {
	fields["v"], fields["k"], fields["id"], fields["t"] = 1, kind, id, time.Now().UnixMilli()
	c.lock.Lock()
	defer c.lock.Unlock()
	select {
	case c.outbox <- outgoing{fmt.Sprintf("fc/v1/%s/%s/%s", c.federation, topic, c.cid), topic == "st", writeJSON(fields)}:
	default: // the connection hangs; all of it is said again on the next one
	}
}

type outgoing struct {
	topic   string
	retain  bool
	payload []byte
}

// deliver publishes in order. The library's Publish blocks for good when its connection ends, so it has a goroutine for each.
func deliver(link mqtt.Client, outbox chan outgoing, delivered chan bool) {
	for o := range outbox {
		link.Publish(o.topic, 1, o.retain, o.payload).WaitTimeout(5 * time.Second)
	}
	delivered <- true
}

// run keeps a connection until `stop` is closed.
func (c *client) run(stop chan os.Signal) {
	c.birth, c.block = fmt.Sprintf("%08x", rand.Uint32()), 65536
	c.inbox, c.done, c.blobs = make(chan mqtt.Message, 4096), make(chan finished, 4), map[string][]byte{}
	for failures := 0; ; failures++ {
		if c.connect() {
			failures = 0
			if !c.serve(stop) {
				return
			}
		}
		longest := 120.0
		if failures < 7 {
			longest = float64(int(1) << failures)
		}
		select {
		case <-time.After(time.Duration(rand.Float64() * longest * float64(time.Second))):
		case <-stop:
			return
		}
	}
}

func (c *client) connect() bool {
	c.lock.Lock()
	c.disk.Births++
	c.save()
	births := c.disk.Births
	c.lock.Unlock()
	lost := make(chan error, 1)
	c.lost = lost
	root := "fc/v1/" + c.federation
	will := writeJSON(object{"v": 1, "k": "st", "id": "lost-1", "t": time.Now().UnixMilli(), "s": "lost", "bd": int64(births)})
	options := mqtt.NewClientOptions().AddBroker(c.broker).SetClientID(c.federation+"."+c.cid).SetProtocolVersion(4).SetCleanSession(true).
		SetBinaryWill(root+"/st/"+c.cid, will, 1, true).SetKeepAlive(60 * time.Second).SetAutoReconnect(false).SetConnectTimeout(10 * time.Second)
	options.SetConnectionLostHandler(func(_ mqtt.Client, err error) { lost <- err })
	options.SetDefaultPublishHandler(func(_ mqtt.Client, m mqtt.Message) { c.inbox <- m })
	if c.tls != nil {
		options.SetTLSConfig(c.tls)
	}
	link := mqtt.NewClient(options)
	if token := link.Connect(); !token.WaitTimeout(15*time.Second) || token.Error() != nil {
		c.say(object{"event": "no connection", "why": fmt.Sprint(token.Error())})
		return false
	}
	c.lock.Lock()
	c.link, c.outbox, c.delivered = link, make(chan outgoing, 256), make(chan bool, 1)
	c.lock.Unlock()
	token := link.SubscribeMultiple(map[string]byte{root + "/bc/coord": 1, root + "/bc/cat": 1, root + "/dn/" + c.cid + "/#": 1}, nil)
	if !token.WaitTimeout(15*time.Second) || token.Error() != nil {
		link.Disconnect(100)
		return false
	}
	go deliver(link, c.outbox, c.delivered)
	c.present("on")
	c.announce = time.Now() // once after each connection
	return true
}

func (c *client) present(how string) {
	c.lock.Lock()
	fields := object{"s": how, "bd": int64(c.disk.Births)}
	c.lock.Unlock()
	if how == "on" {
		fields["sw"] = "second-client"
		fields["caps"] = object{"engine": c.engine, "n": len(c.train.x), "codecs": []any{"f32", "i8"}, "window": 4, "runtime": "second-client 1"}
	}
	c.send("st", "st", c.newID(), fields)
}
