package main

// A device's life: sections 7, 10 and 11. One goroutine reads the messages, another works on the task.

import (
	"context"
	"crypto/tls"
	"fmt"
	"math/rand"
	"os"
	"strings"
	"sync"
	"time"

	mqtt "github.com/eclipse/paho.mqtt.golang"
)

type client struct {
	federation, cid, broker, folder, engine string
	ring                                    keyring
	train, test                             samples
	tls                                     *tls.Config
	quitAt                                  string // for tests: the stage of a sum at which the process ends

	lock     sync.Mutex // of what the worker and the reader share: disk, transfer, link
	disk     memory
	link     mqtt.Client
	outbox   chan outgoing
	transfer *transfer
	birth    string // prefix of message ids
	sent     int64

	blobs  map[string][]byte // the worker's
	mark   uint16
	passed string // sha256 of the program whose golden run passed

	boot          string
	coordLink     string    // the process and connection of the coordinator that this device is known to
	presentAt     time.Time // when `st on` is sent again
	block         int64
	task          object
	taskID        any
	taskEpoch     int64
	cancel        context.CancelFunc
	deadline      *time.Timer
	waiting       object // a task that waits for the answer to an i8 update
	until         time.Time
	freed         bool
	done          chan finished
	inbox         chan mqtt.Message
	delivered     chan bool
	lost          chan error
	announce      time.Time // when `rdy` is sent next
	lastAnnounced string
}

type finished struct {
	task    object
	answer  *answer
	refused *refusal
	seconds float64
	after   []func(*memory)
}

func (c *client) say(event object) { os.Stdout.Write(append(writeJSON(event), '\n')) }

func (c *client) newID() string {
	c.lock.Lock()
	defer c.lock.Unlock()
	c.sent++
	return fmt.Sprintf("%s-%d", c.birth, c.sent)
}

// serve handles messages until the connection is lost (true) or the process is told to stop (false).
func (c *client) serve(stop chan os.Signal) bool {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case m := <-c.inbox:
			c.receive(m.Topic(), m.Payload(), m.Retained())
			c.goOn()
		case f := <-c.done:
			c.finish(f)
		case <-tick.C:
			if !c.announce.IsZero() && time.Now().After(c.announce) {
				c.sendReady()
			}
			if !c.presentAt.IsZero() && time.Now().After(c.presentAt) {
				c.presentAt = time.Time{}
				c.present("on")
			}
			c.goOn()
		case err := <-c.lost:
			c.say(object{"event": "connection lost", "why": fmt.Sprint(err)})
			return true
		case <-stop:
			c.present("off")
			close(c.outbox)
			select {
			case <-c.delivered:
				c.link.Disconnect(250)
			case <-time.After(2 * time.Second):
			}
			return false
		}
	}
}

// goOn starts the task that waited for the answer to an i8 update, or ends it where none came.
func (c *client) goOn() {
	m, freed := c.waiting, c.freed
	c.freed = false
	if m == nil {
		return
	}
	if freed {
		c.waiting = nil
		c.start(m)
	} else if time.Now().After(c.until) {
		c.waiting = nil
		c.nack(m, refusal{"deadline", "the update before has no answer"})
	}
}

func leftOf(m object) time.Duration { return time.Duration(m["left_ms"].(int64)) * time.Millisecond }

func (c *client) receive(topic string, payload []byte, retained bool) {
	if len(payload) == 0 || attempt(func() { checkTopic(topic) }) != nil {
		return
	}
	rest := strings.TrimPrefix(topic, "fc/v1/"+c.federation+"/")
	switch parts := strings.Split(rest, "/"); {
	case rest == "bc/coord":
		if m, r := readAs(payload, "coord"); r == nil {
			c.onCoord(m, retained)
		}
	case len(parts) == 3 && parts[2] == "t":
		m, r := readAs(payload, "task", "go", "ack", "near", "stop", "rebirth", "err")
		if r != nil {
			c.refuseMessage(payload, r)
		} else if m["epoch"].(int64) < c.disk.Epoch {
			c.nack(m, refusal{"old_epoch", "a later coordinator has sent its record"})
		} else {
			c.onMessage(m)
		}
	case len(parts) == 5 && parts[0] == "dn":
		var index int64
		fmt.Sscan(parts[4], &index)
		c.lock.Lock()
		t := c.transfer
		c.lock.Unlock()
		if t != nil && t.sha[:16] == parts[3] {
			select {
			case t.blocks <- arrived{index, payload}:
			default: // it is asked for again
			}
		}
	}
}

func readAs(payload []byte, kinds ...string) (m object, r *refusal) {
	r = attempt(func() { m = readMessage(payload, kinds...) })
	return
}

// refuseMessage answers what could be read of a message that breaks a rule.
func (c *client) refuseMessage(payload []byte, r *refusal) {
	c.say(object{"event": "refused", "code": r.code, "detail": r.detail})
	attempt(func() {
		m := readObject(payload)
		checkFields(m, "id:id")
		c.nack(m, *r)
	})
}

func (c *client) nack(m object, r refusal) {
	fields := object{"re": m["id"], "code": r.code, "detail": r.detail[:min(200, len(r.detail))]}
	if attempt(func() { checkFields(m, "run:run round:u32 exchange:u32") }) == nil {
		fields["run"], fields["round"], fields["exchange"] = m["run"], m["round"], m["exchange"]
	}
	c.send("rq", "nack", c.newID(), fields)
}

func (c *client) onCoord(m object, retained bool) {
	epoch := m["epoch"].(int64)
	if !c.ring.knows(c.federation, m) || epoch > c.disk.Epoch+1000000 || epoch < c.disk.Epoch {
		return
	}
	c.lock.Lock()
	if key := m["key"].(string); epoch > c.disk.Epoch || key != c.disk.EpochKey {
		c.disk.Epoch, c.disk.EpochKey = epoch, key
		c.save()
	}
	c.lock.Unlock()
	c.noteLink(m, retained)
	c.block = m["block"].(int64)
	if !strings.Contains(","+strings.Trim(string(writeJSON(m["proto"])), "[]")+",", ",1,") {
		c.say(object{"event": "stopped", "why": "the coordinator speaks other versions of the protocol"})
		os.Exit(1)
	}
	if boot := m["boot"].(string); boot != c.boot {
		c.boot = boot
		if r := c.disk.Result; r != nil && !r.Freed {
			c.announce = time.Now().Add(spread(m))
		}
	}
}

func spread(coord object) time.Duration {
	return time.Duration(rand.Int63n(coord["spread_ms"].(int64)+1)) * time.Millisecond
}

// noteLink has this device announced to a connection of the coordinator that is newer than the device's own and may lack its `st`.
func (c *client) noteLink(coord object, retained bool) {
	link := fmt.Sprint(coord["boot"], coord["link"])
	if !retained && coord["online"] == true && link != c.coordLink {
		c.presentAt = time.Now().Add(spread(coord))
	}
	c.coordLink = link
}

func sameKey(m object, run any, round, exchange any) bool {
	return m != nil && m["run"] == run && m["round"] == round && m["exchange"] == exchange
}

func (c *client) onMessage(m object) {
	r := c.disk.Result
	switch m["k"] {
	case "task":
		if r != nil && sameKey(m, r.Run, r.Round, r.Exchange) {
			c.announce = time.Now()
		} else if r != nil && r.isPast(m) {
			return // the run is further here
		} else if sameKey(c.task, m["run"], m["round"], m["exchange"]) {
			c.taskID, c.taskEpoch = m["id"], m["epoch"].(int64)
			c.deadline.Reset(leftOf(m))
		} else if r != nil && !r.Freed && r.Answer.Residual != nil {
			c.waiting, c.until = m, time.Now().Add(leftOf(m)) // the answer decides which residual the next update adds
			c.announce = time.Now()
		} else {
			c.start(m)
		}
	case "stop":
		if sameKey(c.waiting, m["run"], m["round"], m["exchange"]) {
			c.waiting = nil
		}
		if sameKey(c.task, m["run"], m["round"], m["exchange"]) {
			c.drop()
		}
		if r != nil && sameKey(m, r.Run, r.Round, r.Exchange) {
			c.free()
		}
	case "rebirth":
		c.present("on")
	case "go":
		if r != nil && !r.Freed && m["sha256"] == sha256Of(r.Answer.Data) {
			c.announce = time.Now().Add(60*time.Second + c.jitter())
			mf := newManifest(r.Answer.What, r.Answer.Data, r.Block)
			var have []byte
			if m["have"] != nil && attempt(func() { have = readBitmap(m["have"], mf.total()) }) != nil {
				return
			}
			go c.upload(c.link, mf, r.Answer.Data, have, m["shard"].(int64), m["window"].(int64))
		}
	case "ack":
		if r != nil && sameKey(m, r.Run, r.Round, r.Exchange) && m["sha256"] == sha256Of(r.Answer.Data) {
			c.onAck(m, r)
		}
	case "err":
		c.onError(m)
	}
}

func (c *client) jitter() time.Duration { return time.Duration(rand.Int63n(int64(10 * time.Second))) }

func (c *client) drop() {
	c.cancel()
	c.deadline.Stop()
	c.task = nil
}

func (c *client) start(m object) {
	if c.task != nil {
		c.drop()
	}
	stage := text(m, "stage", m["job"].(string))
	c.say(object{"event": "task", "job": stage, "run": m["run"], "round": m["round"], "exchange": m["exchange"]})
	if stage == c.quitAt {
		os.Exit(7)
	}
	ctx, cancel := context.WithCancel(context.Background())
	c.task, c.taskID, c.taskEpoch, c.cancel = m, m["id"], m["epoch"].(int64), cancel
	c.deadline = time.AfterFunc(leftOf(m), cancel)
	go func() {
		began := time.Now()
		f := finished{task: m}
		w := &work{client: c, ctx: ctx, task: m}
		f.refused = attempt(func() { f.answer = w.perform() })
		f.after = w.after
		f.seconds = time.Since(began).Seconds()
		c.done <- f
	}()
}

func (c *client) finish(f finished) {
	if c.task == nil || !sameKey(c.task, f.task["run"], f.task["round"], f.task["exchange"]) {
		return
	}
	c.drop()
	if f.refused != nil {
		c.say(object{"event": "nack", "code": f.refused.code, "detail": f.refused.detail})
		c.nack(object{"id": c.taskID, "run": f.task["run"], "round": f.task["round"], "exchange": f.task["exchange"]}, *f.refused)
		return
	}
	c.lock.Lock()
	for _, change := range f.after {
		change(&c.disk)
	}
	epoch := c.taskEpoch // a task is not signed: no more counts than a signed record's
	if epoch > c.disk.Epoch {
		epoch = c.disk.Epoch
	}
	c.disk.Result = &result{Run: f.task["run"].(string), Round: f.task["round"].(int64), Exchange: f.task["exchange"].(int64), Epoch: epoch, Answer: *f.answer, Seconds: f.seconds, Block: c.block}
	c.save()
	c.lock.Unlock()
	c.sendReady()
}
